"""The decoder-only Mixture-of-Experts transformer, plain torch. Knows neither peers nor Hugging Face names."""
