"""The forms of a request and its answer that clients, router, engine and offline use share."""
