"""What creates machines: a provider per cloud, ``local`` among them, and the clusters this user has made with them."""
