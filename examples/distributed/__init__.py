"""Training on many machines: with Ray, and as a job of Kubernetes."""
