"""SGLang's backends behind the suite: its batch objects, its runner's calls, its pools."""
