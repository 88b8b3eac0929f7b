"""chunked."""
