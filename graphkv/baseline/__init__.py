"""V1 as a whole: one pool a layer, full tables uploaded every step, no graph. What V2 is compared with."""
