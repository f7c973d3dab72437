"""The image that `Containerfile` makes (`make test-container`)."""
