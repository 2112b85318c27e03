"""The steps of a device and of a pipeline's stage."""
