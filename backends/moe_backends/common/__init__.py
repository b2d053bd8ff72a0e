"""What several backends are made of: routing, NVFP4 codes, checks of layers, a cache of weights, ranks on one GPU."""
