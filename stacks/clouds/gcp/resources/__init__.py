"""The resources that Pulumi makes on Google: ``network``, ``storage``, ``identity``, ``group``, a component each."""
