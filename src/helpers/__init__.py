"""Mechanics of the study. The notebooks read like the study because what they call lives here."""

import warnings

# tqdm asks for a widget in every notebook; widgets would make published pages load scripts from elsewhere
warnings.filterwarnings("ignore", message="IProgress not found")
