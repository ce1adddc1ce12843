"""What all tests share: eight CPU devices, as a pipeline's tests need several
and JAX makes them once in a process."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
