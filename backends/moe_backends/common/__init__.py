"""What several backends are made of: routing, NVFP4 codes, checks of a layer and its inputs, a cache of weights."""
