"""`spes-p2p receipt`: what a run has counted of a peer's work, as a file that anybody checks. Only flags and text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, option

if TYPE_CHECKING:
    from spes_p2p.sync.receipts import Receipt


def receipt(
    invitation: Invitation = None,
    check: Annotated[Path | None, option("Check this receipt, without the run.", metavar="FILE")] = None,
    output: Annotated[Path, option("Folder of the peer whose work the receipt is for.", "--output", "-o")] = Path(
        "peer"
    ),
    fingerprint: Fingerprint = None,
) -> None:
    """Makes a receipt of the work that a run has counted of a peer, or checks one: that takes no network.

    With an invitation or --fingerprint, a receipt of any other run is refused.

    Example: spes-p2p receipt --output peer; spes-p2p receipt --check peer/receipt.spes
    """
    from spes_p2p.peer.options import meeting

    wanted = meeting((invitation,) if invitation else (), (), None, fingerprint).fingerprint
    if check is not None:
        typer.echo(receipt_text(_checked(check, wanted)))
        return
    from spes_p2p.peer.receipts import get_receipt

    path, _ = get_receipt(output)
    typer.echo(f"{path}: {receipt_text(_checked(path, wanted))}")


def _checked(path: Path, fingerprint: str | None) -> Receipt:
    """Raises ConfigError where it cannot be read, or is of another run; RemoteProtocolError where it is not good."""
    from spes_p2p.errors import ConfigError, RemoteProtocolError
    from spes_p2p.swarm.keys import RsaVerifier
    from spes_p2p.sync.receipts import check_receipt

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="give the file of a receipt") from error
    try:
        found = check_receipt(data, RsaVerifier().verify)
    except RemoteProtocolError as error:
        fix = "ask whose receipt it is for the file as it was made; nobody can mend it"
        raise RemoteProtocolError(f"{path} is not a good receipt: {error}", fix=fix) from error
    own = found.info.fingerprint.hex()
    if not own.startswith((fingerprint or "").lower()):
        raise ConfigError(
            f"{path} is a receipt of run {found.info.run_id} with fingerprint {own[:16]}, not of {fingerprint}",
            fix="ask for a receipt of the right run",
        )
    return found


def receipt_text(receipt: Receipt) -> str:
    """What it says, in a few lines."""
    info, shown, account = receipt.info, receipt.manifest, receipt.account
    signers = ", ".join("its organiser" if peer == info.organiser else peer for peer in receipt.signers)
    share = 100 * account.tokens / max(1, shown.tokens)
    audits = account.passed + account.failed + account.withheld
    found = f"{account.passed:,} passed, {account.failed:,} failed, {account.withheld:,} not shown anything"
    audited = f"\n  {audits:,} of these rounds audited: {found}" if audits else ""
    return (
        f"run {info.run_id} with fingerprint {info.fingerprint.hex()} has counted of {account.peer}:\n"
        f"  {account.tokens:,} tokens ({share:.1f}% of the run's) and {account.steps:,} steps, in "
        f"{account.rounds:,} of {shown.round:,} rounds{audited}\n  by the ledger of manifest {shown.name.hex()[:16]}, "
        f"signed by {signers}"
    )
