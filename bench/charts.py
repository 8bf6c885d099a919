"""What all pictures share: no screen is needed, and colours that everybody can tell apart."""

import matplotlib

matplotlib.use("Agg")

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#009E73", "#CC79A7")
