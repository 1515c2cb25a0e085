"""Every test process gets two CPU devices, so that target and drafter can have one each."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
