"""What computes: generation, scoring and training behind one Protocol each. With
``pipeline.algorithms`` the door to torch.
"""
