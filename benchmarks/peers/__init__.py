"""Other engines beside Baton: the same weights and token ids, in the same run."""
