"""Process mesh, groups, links and UnitState (flat buffers, weight versions)."""
