"""The Triton kernels. A module here has the name of the module of `kernels` that holds its reference and calls it."""
