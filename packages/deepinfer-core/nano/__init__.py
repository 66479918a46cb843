"""How the shipped model `deepinfer-nano` is made: data, training, export and evaluation."""
