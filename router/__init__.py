"""The router: text in and out, routing, the request pipeline. Imports no torch."""
