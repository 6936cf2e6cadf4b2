"""How long a training takes, by closed forms: Megatron-LM's estimate and Lamy-Poirier's shortest time over layouts."""
