"""Our tensor names and Hugging Face's: one table, read both ways."""
