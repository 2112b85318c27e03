"""Measures other engines beside Baton, on the same weights and token ids, in the same run."""
