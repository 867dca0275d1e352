"""Training fault tolerance by callbacks: the low-level interface that frameworks adapt to, behind `mindio_ttp`.

A controller leads, a processor in every training process carries out. The framework reports its optimizer updates and
registers callbacks; the controller decides which of them run when. `evertrain.torch` needs none of this.
"""
