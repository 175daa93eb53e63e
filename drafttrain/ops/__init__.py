"""Fused operations, one file each: a public function, its plain-torch twin, and the choice between them."""
