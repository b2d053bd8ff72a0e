"""The conformance tests, one file per clause family."""
