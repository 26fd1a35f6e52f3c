"""The resources that Pulumi makes on AWS: ``network``, ``storage``, ``identity``, ``group``, a component each."""
