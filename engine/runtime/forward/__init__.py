"""The inputs of a forward pass and its recorded forms."""
