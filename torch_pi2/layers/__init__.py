"""The modules that compute feed-forward layers sparsely, in memory and over a store."""
