"""Names and forms of earlier versions of the reference pages."""
