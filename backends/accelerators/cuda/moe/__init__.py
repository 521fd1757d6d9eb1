"""MoE without products of its own."""
