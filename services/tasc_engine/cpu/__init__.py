"""What a CPU computes in compiled code: attention over the rows of a step, and what lies between a
layer's products. Linear layers are left to oneDNN. It knows arrays, no models and no rows' texts.
"""
