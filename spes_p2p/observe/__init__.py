"""What happens as typed events, and everything that people see of them."""
