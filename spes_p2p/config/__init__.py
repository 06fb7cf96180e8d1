"""One YAML tree for a run: schema, loading, fingerprint. Imports neither torch nor transformers."""
