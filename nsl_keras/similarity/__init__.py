"""Neural Similarity Learning: convolutions with a bilinear similarity `W^T M x`."""
