"""Neural Similarity Learning: layers with a bilinear similarity `W^T M x`."""
