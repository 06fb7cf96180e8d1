"""A rank above 0 whose experts are in bf16: what `python -m spes_p2p.train.worker` is for those in fp32."""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

from spes_p2p.train import worker
from spes_p2p.train.rank import RankTrainer
from tests.train.small import InBf16

if __name__ == "__main__":
    with patch.object(worker, "RankTrainer", partial(RankTrainer, make_model=InBf16)):
        worker.main(sys.argv[1:])
