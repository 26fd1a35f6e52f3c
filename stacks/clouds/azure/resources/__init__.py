"""The resources that Pulumi makes on Azure: ``network``, ``storage``, ``identity``, ``group``, a component each."""
