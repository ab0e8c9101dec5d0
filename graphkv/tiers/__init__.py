"""Where blocks rest when they are not on the device, and how their bytes get there and back."""
