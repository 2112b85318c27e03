"""What benchmarks print and write: one report, as text, JSON, PNG and HTML."""
