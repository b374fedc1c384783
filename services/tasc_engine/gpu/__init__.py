"""What a GPU computes in kernels of our own, and steps as captured graphs. It knows tensors and
places of the cache, no requests.
"""
