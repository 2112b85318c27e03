"""Model families as plain tensor code. `registry` says which architecture is which."""
