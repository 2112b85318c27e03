"""Models and heads that draft tokens."""
