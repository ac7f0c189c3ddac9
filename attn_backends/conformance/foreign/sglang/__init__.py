"""SGLang's backends under the suite: its batch objects, its runner's calls, its pools."""
