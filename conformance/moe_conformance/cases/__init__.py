"""What is run: cases, the profiles and models that choose them, and the inputs that a case stands for."""
