"""The experts of one layer: all of them for the forward pass, gradients for the owned ones alone."""
