"""The operators: public function, schema, check, fake and dispatch, one file each."""
