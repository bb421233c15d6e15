"""The page of a reproduction, as Markdown and as HTML: verdict, main table, what differs and why, details."""
