"""Next-token distributions of a model's forms and engines, compared with float32."""
