"""The MoE ops: dispatch with its grouped product, and combine."""
