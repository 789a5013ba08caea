"""What is to be measured: messages between ranks, and layers on a GPU."""
