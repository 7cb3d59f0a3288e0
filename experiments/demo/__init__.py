"""Images of digits, MNIST or CIFAR-10: every method trained, drawn, exported, served."""
