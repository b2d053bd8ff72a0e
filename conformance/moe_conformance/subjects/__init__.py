"""What a conformance test is handed: a backend with a case, ready to run and to be judged."""
