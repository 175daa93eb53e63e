"""Fused operators, one file each: a public function, its plain-torch twin `reference`, and the choice between the two."""
